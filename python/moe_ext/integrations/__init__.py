"""Back ends for other libraries, each a package of its own that imports its library."""
