"""Secrets in addresses: what is printed, logged, linked, recorded or exported has none of them."""

import re
from urllib.parse import urlsplit, urlunsplit

MASK = "***"
"""In place of what nobody is to read."""
_AUTHORITY = re.compile(r"(?<=://)([^\s/?#'\"<>]*)@")
"""User and password as RFC 3986 has them, up to the last @ before the path."""
_LENIENT = re.compile(r"(?<=://)([^\s/@:?#'\"<>]*):(?!\d*(?:[/?#\s'\"<>]|$))[^\s@'\"<>]*@")
"""A password with a slash or a question mark in it, as SQLAlchemy takes it: what looks like a port is none."""
_QUERY = re.compile(
    r"([?&;][^\s=&;]*(?:passw|pwd|secret|token|credential|signature|(?<![a-z])sig|api_?key|access_?key|account_?key)[^\s=&;]*=)"
    r"[^\s&;#'\"<>]+",
    re.IGNORECASE,
)
_NAMED_USERS = ("ssh", "sftp", "scp", "hdfs", "gs", "s3")
"""Schemes whose user without a password is a name; elsewhere it may be a token."""


def masked(text: str) -> str:
    """The text with `***` for every password, token and key in an address of it. Masking again changes nothing."""
    return _QUERY.sub(rf"\1{MASK}", _LENIENT.sub(rf"\1:{MASK}@", _AUTHORITY.sub(_without_password, text)))


def _without_password(match: re.Match[str]) -> str:
    user, colon, _ = match[1].partition(":")
    scheme = re.search(r"[a-z0-9+.-]*$", match.string[: match.start() - 3], re.IGNORECASE)
    named = colon or (scheme and scheme[0].lower() in _NAMED_USERS)
    return f"{user if named else MASK}{colon and ':' + MASK}@"


def without_credentials(url: str) -> str:
    """The address as a link has it: without user, password and what a query says."""
    parts = urlsplit(_LENIENT.sub("", url))
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
