"""The built-in tasks: how each is cut from a data set that ships inside a Python package."""
