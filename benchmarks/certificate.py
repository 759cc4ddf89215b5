"""A self-signed certificate of `localhost` for the servers that speak TLS."""

import shutil
import ssl
import subprocess
from pathlib import Path

from benchmarks.processes import ProcessFailed

_SECONDS = 30.0


def missing_reason() -> str | None:
    """Why no certificate can be made here; None when openssl is installed."""
    return None if shutil.which("openssl") else "install openssl"


def make_certificate(folder: Path) -> Path:
    """Make cert.pem and key.pem in `folder`; returns the first. Raises ProcessFailed."""
    certificate = folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(certificate.with_name("key.pem")), "-out", str(certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise ProcessFailed(f"cannot make a certificate: {error}") from error
    return certificate


def server_context(certificate: str) -> ssl.SSLContext:
    """The context of a server with the certificate that `make_certificate` made."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, Path(certificate).with_name("key.pem"))
    return context
