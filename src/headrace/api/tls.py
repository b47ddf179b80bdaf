"""The certificate of `headrace serve`: looked at before anything is loaded, so that a server never comes up without it."""

from __future__ import annotations

import ssl

from headrace.errors import ParameterError

CERTIFICATE, KEY = "--ssl-certfile", "--ssl-keyfile"


def tls_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """What HTTPS is served with; None: nobody asked for it. Raises ParameterError that names the option and its fault."""
    if certfile is None:
        if keyfile is not None:
            raise ParameterError(KEY, keyfile, f"nothing without {CERTIFICATE}")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key, named = (KEY, keyfile) if keyfile is not None else (CERTIFICATE, certfile)

    def no_password() -> str:
        raise ParameterError(key, named, "a key without a password: nobody could type it when the server starts again")

    try:
        context.load_cert_chain(certfile, keyfile, no_password)
    except OSError as error:  # ssl.SSLError is one
        for option, path in ((CERTIFICATE, certfile), (key, named)):
            _check_readable(option, path)
        raise _blamed(error, certfile, keyfile) from None
    return context


def _check_readable(option: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as e:
        raise ParameterError(option, path, f"a file that can be read ({e.strerror or e})") from None


def _blamed(error: OSError, certfile: str, keyfile: str | None) -> ParameterError:
    """Which of the two is at fault: both can be read."""
    reason = getattr(error, "reason", None) or ""
    said = reason.replace("_", " ").lower() or str(error)
    if reason == "KEY_VALUES_MISMATCH":
        return ParameterError(KEY, keyfile or certfile, f"the private key of {certfile}, which is another")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certfile)
    except (OSError, ValueError):
        return ParameterError(CERTIFICATE, certfile, "a certificate (or a chain, the server's own first) in PEM form")
    if reason.startswith(("EE_", "CA_")):  # OpenSSL's policy: too small a key, too weak a digest
        return ParameterError(CERTIFICATE, certfile, f"a certificate that OpenSSL takes ({said})")
    if keyfile is None:
        return ParameterError(KEY, None, f"the certificate's private key in PEM form: {certfile} holds none that can be read")
    return ParameterError(KEY, keyfile, "the certificate's private key in PEM form")
