"""The commands `demo`, `compare` and `collect` of the program `midstream`."""
