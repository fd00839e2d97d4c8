"""A package, so that a script of the same name elsewhere on the path cannot take its place."""
