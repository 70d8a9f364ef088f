"""Python side of Halfwire. Importing it needs nothing beyond the standard library."""

__version__ = "0.1.0"
