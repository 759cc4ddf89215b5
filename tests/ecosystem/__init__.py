"""Test suites of other projects on uringloop: suites.py, expected.txt (see README.md)."""
