"""One module a command: ``add`` declares its flags, ``run`` does it and returns the exit code."""
