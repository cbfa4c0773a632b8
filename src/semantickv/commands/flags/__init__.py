"""Flags that several commands share, and the values that they give. A command's own flags are beside its code."""
