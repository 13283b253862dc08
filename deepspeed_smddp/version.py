"""The version of the package, for modules that the package imports itself."""

__version__ = "0.2.0"
