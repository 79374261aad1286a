"""Shared utilities: files, locks, errors, text and progress bars. Imports nothing else from the package."""
