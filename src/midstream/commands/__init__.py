"""Commands of the program `midstream` that are no part of the library: `demo` and `compare`."""
