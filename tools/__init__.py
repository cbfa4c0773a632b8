"""Scripts of this repository that are not part of the distribution."""
