"""A pytest plugin for tornado's tests: what tornado.test.runtests sets up."""

import logging

logging.getLogger("tornado.access").setLevel(logging.CRITICAL)
