"""A local page that shows which tokens of a prompt earlier prompts already hold, and why."""
