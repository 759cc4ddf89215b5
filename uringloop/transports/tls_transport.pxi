# TlsTransport: what the application holds of a TLS connection; all is done by the TlsProtocol.
#
# Owner: the application, and the TlsProtocol until the connection is lost.

class SSLTransportType(transports._FlowControlMixin, asyncio.Transport):
    """What isinstance() sees. Programs look for "ssl" in the name of a transport's class."""

    __slots__ = ()


@cython.final
cdef class TlsTransport:
    cdef TlsProtocol tls
    cdef bint closed
    cdef dict __dict__          # tests and tools replace write() and the like on one transport
    cdef object __weakref__

    _start_tls_compatible = True
    _sendfile_compatible = constants._SendfileMode.FALLBACK

    def __cinit__(self, maker=None):
        self.closed = True
        if maker is not _BY_THE_LOOP:
            raise TypeError("transports are made by the event loop")

    @property
    def __class__(self):
        return SSLTransportType

    def __dir__(self):
        return sorted({*dir(type(self)), *getattr(self, "__dict__", ())})

    @property
    def _loop(self):
        return self.tls.loop

    @property
    def _ssl_protocol(self):
        return self.tls

    @property
    def _protocol_paused(self):
        return self.tls.app_writing_paused

    def get_extra_info(self, name, default=None):
        """What is known by name: "sslcontext", "ssl_object", "peercert", "cipher", "compression"
        once the handshake is over; the rest until the connection is lost."""
        return self.tls.extra_info(name, default)

    def get_protocol(self):
        """The current protocol; None once the connection is lost."""
        return self.tls.app

    def set_protocol(self, protocol):
        """Switch to another protocol, of either kind; what arrives next goes to it."""
        self.tls.set_app(protocol)

    def is_closing(self):
        """Whether the transport is closing or closed."""
        return self.closed

    def close(self):
        """Send what was written, then close_notify, and wait for the peer's; connection_lost()
        follows."""
        if not self.closed:
            self.closed = True
            self.tls.start_shutdown()
        else:
            self.tls.let_go()

    def abort(self):
        """Close at once: what was not sent is dropped; connection_lost(None) follows."""
        self._force_close(None)

    def _force_close(self, exc):
        self.closed = True
        self.tls.abort(exc)

    def __del__(self):
        if not self.closed:
            self.closed = True
            self.tls.loop.warn(f"unclosed transport {self!r}", ResourceWarning, source=self)

    # --- input -------------------------------------------------------------------------------

    def is_reading(self):
        """Whether data is delivered as it arrives."""
        return not self.tls.app_reading_paused

    def pause_reading(self):
        """Deliver no data until resume_reading()."""
        self.tls.app_reading_paused = True

    def resume_reading(self):
        """Deliver data again, from the next iteration on."""
        self.tls.resume_app_reading()

    def get_read_buffer_size(self):
        """Bytes that wait to be decrypted."""
        return self.tls.codec.input_size()

    def get_read_buffer_limits(self):
        """(low, high) in bytes."""
        return self.tls.read_low, self.tls.read_high

    def set_read_buffer_limits(self, high=None, low=None):
        """Set the marks in bytes: reading from the connection stops from high on and goes on at
        low, while the protocol has paused reading. Defaults: high = 256 KiB (or 4 * low),
        low = high // 4. ValueError unless high >= low >= 0.
        """
        self.tls.read_high, self.tls.read_low = tls_limits(
            high, low, constants.FLOW_CONTROL_HIGH_WATER_SSL_READ)
        self.tls.control_input()

    # --- output ------------------------------------------------------------------------------

    def write(self, data):
        """Send bytes-like data; never blocks. TypeError for anything else."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError("data: expecting a bytes-like instance, "
                            f"got {type(data).__name__}")
        if data:
            self.tls.write(data)

    def writelines(self, list_of_data):
        """Send an iterable of bytes-like objects, as one write."""
        self.tls.write_parts(list_of_data)

    def can_write_eof(self):
        """False: TLS cannot be closed for writing alone."""
        return False

    def write_eof(self):
        """NotImplementedError."""
        raise NotImplementedError

    def get_write_buffer_size(self):
        """Bytes that wait for the transport below."""
        self.tls.write_deferred()
        return self.tls.output_size()

    def get_write_buffer_limits(self):
        """(low, high) in bytes."""
        return self.tls.write_low, self.tls.write_high

    def set_write_buffer_limits(self, high=None, low=None):
        """Set the marks in bytes: pause_writing() from high on, resume_writing() at or below low.
        Defaults: high = 512 KiB (or 4 * low), low = high // 4. ValueError unless high >= low >= 0.
        """
        self.tls.write_high, self.tls.write_low = tls_limits(
            high, low, constants.FLOW_CONTROL_HIGH_WATER_SSL_WRITE)
        self.tls.write_deferred()
        self.tls.control_app_writing()

    def _test__append_write_backlog(self, bytes data):
        # What CPython's own tests of TLS call.
        self.tls.append(data)


cdef tuple tls_limits(high, low, Py_ssize_t kib):
    """(high, low) in bytes, completed as by asyncio; ValueError if they are none."""
    if high is None:
        high = kib * 1024 if low is None else 4 * low
    if low is None:
        low = high // 4
    if not high >= low >= 0:
        raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
    return int(min(high, PY_SSIZE_T_MAX)), int(min(low, PY_SSIZE_T_MAX))
