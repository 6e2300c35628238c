"""Files on HTTP and S3 servers: opened at an offset, with the version that the server names.

HTTP is the standard library's. S3 is botocore's, which looks for credentials where Amazon's own tools do
(environment, ``~/.aws``, role of the instance) and takes ``AWS_ENDPOINT_URL_S3``.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import netrc
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import IO, Any
from urllib.parse import parse_qsl, unquote, urlencode, urljoin, urlsplit, urlunsplit

from slipway.common.errors import UserError
from slipway.corpus.errors import missing_library

# 408, 425 and 429 ask for another attempt; those from 500 on are the server's own.
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_SECRET_PARAMETER = re.compile(
    r"token|sig|secret|password|credential|key|auth|expires|^x-amz-|^x-goog-", re.I
)
# More digits are no size of a file, and too many for Python.
_NUMBER = "[0-9]{1,18}"
_CONTENT_RANGE = re.compile(rf"bytes (?:({_NUMBER})-{_NUMBER}|\*)/({_NUMBER}|\*)")
# What parsers raise for the words of a server.
_NO_ANSWER = (ValueError, LookupError, TypeError, ArithmeticError)
_LONGEST_RETRY_AFTER = 600.0


class TransientError(Exception):
    """A failure after which another attempt may succeed.

    Attributes
    ----------
    wait
        Seconds that the server asks to wait; None if it names none.
    """

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class ChangedError(Exception):
    """The file on the server is not the one that was received in part."""


@dataclass(frozen=True)
class Version:
    """A file's size and validators (RFC 9110, section 8.8), each None if the server does not name it."""

    size: int | None
    etag: str | None
    modified: str | None

    def validator(self) -> str | None:
        """Return what `If-Range` takes: a strong ETag, else the date."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.modified

    def differs(self, other: Version) -> str | None:
        """Return in what `other` differs; None if everything that both name is equal."""
        pairs = {
            "size": (self.size, other.size),
            "ETag": (self.etag, other.etag),
            "date": (self.modified, other.modified),
        }
        if self.etag and other.etag:
            del pairs["date"]  # copies on several servers have the same ETag but different dates
        return next(
            (
                f"{name} {old} became {new}"
                for name, (old, new) in pairs.items()
                if old and new and old != new
            ),
            None,
        )


@dataclass
class Body:
    """A response: the bytes of a file from `start` on."""

    version: Version
    start: int
    read: Callable[[int], bytes]
    close: Callable[[], None]


def remote(address: str) -> Remote:
    """Return the file at a ``https://``, ``http://`` or ``s3://`` address."""
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError:
        # A password may be anywhere in it.
        raise UserError(f"{address.partition('://')[0]}://...: not a valid address") from None
    if parts.scheme == "s3":
        if not parts.netloc or not parts.path.strip("/"):
            raise UserError(f"{address}: expected s3://BUCKET/KEY")
        # No query in S3: a question mark belongs to the key.
        bucket, _, key = address.removeprefix("s3://").partition("/")
        return S3File(bucket, key)
    if not parts.hostname:
        raise UserError(f"{public_name(address)}: it has no host")
    return HttpFile(address)


def public_name(address: str) -> str:
    """Return a URL without user, password and parameters that carry secrets, such as a signature."""
    parts = urlsplit(address)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    masked = [(key, "***" if _SECRET_PARAMETER.search(key) else value) for key, value in pairs]
    query = urlencode(masked, safe="*") if masked != pairs else parts.query
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, query, ""))


@dataclass(frozen=True)
class HttpFile:
    """A file on a web server. Its user and password come from the address or from ``~/.netrc``."""

    address: str

    @property
    def name(self) -> str:
        """The address without secrets, for logs and manifests."""
        return public_name(self.address)

    @property
    def file_name(self) -> str:
        """The last component of the address, as the server spells it."""
        return unquote(urlsplit(self.address).path).rpartition("/")[2]

    def open(self, start: int, known: Version | None, timeout: float) -> Body | None:
        """Request the bytes from `start` on; None if the whole file is still `known`.

        Parameters
        ----------
        start
            The first byte. The response may begin at 0 nevertheless: the server has no ranges, or another
            version.
        known
            The version of the `start` bytes received; for `start` 0 the version that need not be sent.
        timeout
            Seconds to wait for the connection and for each read.

        Raises
        ------
        TransientError
            If another attempt may succeed.
        ChangedError
            If the server has another version, and did not send it.
        UserError
            If the file does not exist or access is denied.
        """
        headers = {"Accept-Encoding": "identity", "User-Agent": "slipway", **self._authorization()}
        if start:
            headers["Range"] = f"bytes={start}-"
            validator = known.validator() if known else None
            if validator:
                headers["If-Range"] = validator
        elif known and known.etag:
            headers["If-None-Match"] = known.etag
        elif known and known.modified:
            headers["If-Modified-Since"] = known.modified
        parts = urlsplit(self.address)
        plain = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))
        try:
            response = _opener().open(urllib.request.Request(plain, headers=headers), timeout=timeout)
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                if error.code == 304 and known and not start:
                    return None
                raise self._refusal(error) from None
        except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
            raise self._failure(error) from None
        version, first = _version_of(response)
        if known and not start and version.differs(known) is None and (version.etag or version.modified):
            # The server has no conditional requests.
            response.close()
            return None
        return Body(version, first, functools.partial(self._read, response), response.close)

    def _read(self, response: Any, size: int) -> bytes:
        try:
            # Not read(), which waits until it has so much.
            data: bytes = response.read1(size)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failure(error) from None
        return data

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        status = f"HTTP {error.code} {error.reason}".rstrip()
        if error.code in (*_TRANSIENT, 304):
            return TransientError(status, retry_after(error.headers.get("Retry-After")))
        if error.code == 416:
            return ChangedError("the server has fewer bytes than were received")
        if 300 <= error.code < 400:
            try:
                target = public_name(urljoin(self.address, error.headers.get("Location", "")))
            except ValueError:
                target = "an invalid address"
            return UserError(
                f"{self.name}: redirected to {target}, which is not followed: "
                "from https only to https, from http to http or https, and 10 times at most"
            )
        ways_out = {
            401: "; name a user and password for the host in ~/.netrc",
            403: "; access is denied: the host may want an account (~/.netrc), or the address expired",
            404: "; there is no such file: check the address",
            410: "; the file was removed from the server",
        }
        return UserError(f"{self.name}: {status}{ways_out.get(error.code, '')}")

    def _failure(self, error: BaseException) -> Exception:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            return UserError(f"{self.name}: its certificate is not valid: {reason.verify_message}")
        if isinstance(reason, (http.client.InvalidURL, ValueError, OverflowError)):
            return UserError(f"{self.name}: not a valid address: {reason}")
        if isinstance(reason, TimeoutError):
            return TransientError("no answer in time")
        if isinstance(reason, http.client.IncompleteRead):
            return TransientError("the connection was dropped")
        return TransientError(str(reason).strip() or type(reason).__name__)

    def _authorization(self) -> dict[str, str]:
        parts = urlsplit(self.address)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        if not user:
            try:
                login = netrc.netrc().authenticators(parts.hostname or "")
            except (OSError, netrc.NetrcParseError):
                login = None
            if login is None:
                return {}
            user, password = login[0], login[2] or ""
        return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects within HTTP that never lose encryption, nor hand credentials to another host."""

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any
    ) -> Any:
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except (ValueError, OverflowError):  # its target is not an address
            raise urllib.error.HTTPError(req.full_url, code, msg, headers, fp) from None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        target = urlsplit(newurl)
        if target.scheme not in ("https", req.type) or "@" in target.netloc:
            raise urllib.error.HTTPError(req.full_url, code, msg, headers, fp)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and target.netloc != req.host:
            request.remove_header("Authorization")
        return request


class _Connection(http.client.HTTPConnection):
    """Connection with one time-out for all headers: by default each byte begins it anew."""

    is_late = False

    def getresponse(self) -> http.client.HTTPResponse:
        timer = threading.Timer(self.timeout or 0.0, self._end)
        timer.start()
        try:
            return super().getresponse()
        finally:
            timer.cancel()
            if self.is_late:
                raise TimeoutError  # instead of the error of a closed connection

    def _end(self) -> None:
        self.is_late = True
        with contextlib.suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)


class _Handler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> Any:
        connection: Any = type("Connection", (_Connection, http_class), {})
        return super().do_open(connection, req, **options)


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    # Not build_opener(), which adds file:// and ftp://.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        _Handler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener


def _version_of(response: Any) -> tuple[Version, int]:
    """Return version and first byte of a response of status 200 or 206."""
    headers: Message = response.headers
    size, first = _number(headers.get("Content-Length")), 0
    if response.status == 206:
        match = _CONTENT_RANGE.fullmatch((headers.get("Content-Range") or "").strip())
        if match is None or match[1] is None:
            response.close()
            raise TransientError(
                f"a response without a usable Content-Range: {headers.get('Content-Range')!r}"
            )
        first, size = int(match[1]), None if match[2] == "*" else int(match[2])
    return Version(size, headers.get("ETag"), headers.get("Last-Modified")), first


def _number(text: str | None) -> int | None:
    """Return the number of a header; None for other text."""
    return int(text) if text and re.fullmatch(_NUMBER, text.strip()) else None


def retry_after(value: str | None) -> float | None:
    """Return the seconds of a `Retry-After`, which is a number or a date (RFC 9110, section 10.2.3)."""
    if not value:
        return None
    seconds: float | None = _number(value)
    if seconds is None:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except _NO_ANSWER:
            return None
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER)


_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws (AWS_PROFILE chooses one), on "
    "the machine that fetches; a public bucket can be read by its https:// address"
)


@dataclass(frozen=True)
class S3File:
    """An object of a bucket, with what an :class:`HttpFile` has."""

    bucket: str
    key: str

    @property
    def name(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    @property
    def file_name(self) -> str:
        return self.key.rpartition("/")[2]

    def open(self, start: int, known: Version | None, timeout: float) -> Body | None:
        conditions: dict[str, str] = {}
        if start:
            conditions["Range"] = f"bytes={start}-"
        if known and known.etag:
            conditions["IfMatch" if start else "IfNoneMatch"] = known.etag
        try:
            answer = s3_client(timeout).get_object(Bucket=self.bucket, Key=self.key, **conditions)
            size, first, stream = int(answer["ContentLength"]), 0, answer["Body"]
            match = _CONTENT_RANGE.fullmatch(answer.get("ContentRange") or "")
            if match is not None and match[1] is not None:
                first, size = int(match[1]), int(match[2])
        except Exception as error:
            if _s3_status(error) == 304 and "IfNoneMatch" in conditions:
                return None
            raise s3_error(error, self.name) from None
        return Body(
            Version(size, answer.get("ETag"), None),
            first,
            functools.partial(self._read, stream),
            stream.close,
        )

    def _read(self, stream: Any, size: int) -> bytes:
        try:
            data: bytes = stream.read(size)
        except Exception as error:
            raise s3_error(error, self.name) from None
        return data


# A file on a server.
Remote = HttpFile | S3File


def list_s3(bucket: str, prefix: str, timeout: float = 60.0) -> Iterator[tuple[str, int]]:
    """Yield key and size in bytes of the objects with keys that begin with `prefix`, in order."""
    try:
        pages = s3_client(timeout, retries=True).get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=bucket, Prefix=prefix):
            for entry in page.get("Contents", ()):
                yield entry["Key"], int(entry["Size"])
    except Exception as error:
        raise s3_error(error, f"s3://{bucket}/{prefix}") from None


@functools.cache
def s3_client(timeout: float, retries: bool = False) -> Any:
    """Return a client, which threads may share; with botocore's own attempts, or with one alone."""
    try:
        import botocore.config
        import botocore.session
    except ImportError:
        raise missing_library("botocore", "reading s3://") from None
    config = botocore.config.Config(
        retries=None if retries else {"total_max_attempts": 1},
        connect_timeout=timeout,
        read_timeout=timeout,
        max_pool_connections=32,
    )
    return botocore.session.get_session().create_client("s3", config=config)


def s3_error(error: Exception, name: str) -> Exception:
    """Return what an exception of botocore's means for the object or prefix `name`."""
    import botocore.exceptions as botocore_errors

    if isinstance(error, botocore_errors.ClientError):
        return _s3_refusal(error.response, name)
    if isinstance(error, (botocore_errors.NoCredentialsError, botocore_errors.PartialCredentialsError)):
        return UserError(f"{name}: no credentials for S3: {_CREDENTIALS}")
    transient = (
        botocore_errors.ConnectionError,
        botocore_errors.HTTPClientError,
        botocore_errors.IncompleteReadError,
    )
    if isinstance(error, (*transient, OSError)):
        return TransientError(str(error))
    if isinstance(error, (botocore_errors.BotoCoreError, ValueError)):
        return UserError(f"{name}: {error}")
    if isinstance(error, _NO_ANSWER):
        return UserError(f"{name}: the answer is not S3's: {error!r}")
    return error


def _s3_refusal(response: Any, name: str) -> Exception:
    code, message = str(response["Error"].get("Code", "")), response["Error"].get("Message", "")
    metadata = response.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", 0)
    if code in ("PreconditionFailed", "InvalidRange") or status in (412, 416):
        return ChangedError("the object changed while it was being downloaded")
    if status in _TRANSIENT or code in ("SlowDown", "RequestTimeout", "Throttling"):
        return TransientError(
            f"{code} {message}", retry_after(metadata.get("HTTPHeaders", {}).get("retry-after"))
        )
    if code == "NoSuchBucket":
        return UserError(f"{name}: there is no such bucket; for a server of your own set AWS_ENDPOINT_URL_S3")
    if status == 404:
        return UserError(
            f"{name}: there is no such key; s3://BUCKET/PREFIX/ takes all objects below a prefix, and "
            "s3://BUCKET/PREFIX/*.jsonl.zst those that match"
        )
    if status in (400, 401, 403):
        return UserError(f"{name}: {code}: {message}: the credentials do not open it; {_CREDENTIALS}")
    return UserError(f"{name}: {code}: {message}")


def _s3_status(error: Exception) -> int:
    response = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    return int(metadata.get("HTTPStatusCode", 0))
