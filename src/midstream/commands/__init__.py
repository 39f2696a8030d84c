"""The commands `demo` and `compare` of the program `midstream`. The library does not use them."""
