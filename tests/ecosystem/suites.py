"""t"""
SUITES = ()
