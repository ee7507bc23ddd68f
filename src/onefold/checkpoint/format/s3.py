"""Checkpoints in stores that speak S3, through s3fs: one put or an upload in parts, and conditional puts.

A file of up to PUT_BYTES is put by one request: it needs two requests fewer, and no store has to join it. A larger one
goes in parts, several at once, while the next bytes come: one connection alone is slow, and memory is bounded.

Bodies are not signed: over plain http a signature is a second SHA-256 of every byte, which cost more than all the rest
of an upload. A CRC guards them on their way, and the digests in the manifest for ever; of the manifest itself the
SHA-256 is sent in a header, which is signed.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from onefold.checkpoint.format.address import Address
from onefold.checkpoint.format.remote import TRIES_IN_DEADLINE, RemoteStorage
from onefold.checkpoint.format.remote_errors import ObjectMissing, code_of
from onefold.checkpoint.format.storage import Out
from onefold.errors import CheckpointError
from onefold.offload.host_memory import host_share

PUT_BYTES = 256 << 20  # the largest file that is put by one request, from memory
PART_BYTES = 16 << 20
PARTS_OF_ONE_SIZE = 2000  # then parts are twice as large: S3 takes 10,000
CRC = "ChecksumCRC32"
UPLOADS = 4  # parts of one file that are under way at once; each is in memory


class S3Storage(RemoteStorage):
    """A store that speaks S3, through s3fs."""

    def _options(self, configured: dict[str, Any]) -> dict[str, Any]:
        limit_s = self._deadline_s / TRIES_IN_DEADLINE
        ours = {"connect_timeout": min(limit_s, 20.0), "read_timeout": limit_s, "max_pool_connections": 32}
        once = {"retries": {"total_max_attempts": 1}}  # repeating is our part: one deadline, not a product of several
        theirs = configured.get("config_kwargs", {})
        unsigned = {"s3": {"payload_signing_enabled": False, **theirs.get("s3", {})}}
        return {"config_kwargs": {**ours, **theirs, **unsigned, **once}}

    def _made_of(self) -> str:
        """AWS's environment variables, and when the files of credentials and settings were written: once a tool has
        renewed them, a new client is made, which reads them."""
        named = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
        times = [_written_ns(os.path.expanduser(os.environ.get(name, usual))) for name, usual in named.items()]
        return f"{times} {sorted((name, value) for name, value in os.environ.items() if name.startswith('AWS_'))}"

    def __init__(self, address: Address, deadline_s: float) -> None:
        super().__init__(address, deadline_s)
        self._fs.retries = 1

    def create(self, path: Path, size: int | None = None) -> Out:
        whole = size is not None and size <= min(PUT_BYTES, host_share())
        return WholeOut(self, path) if whole else PartsOut(self, path)

    def s3(self, method: str, path: Path, **kwargs: Any) -> Any:
        """One call of the S3 API about the object at a path."""
        bucket, key, _ = self._fs.split_path(self.key(path))
        return self.call("call_s3", method, Bucket=bucket, Key=key, **kwargs)

    def upload(self, method: str, path: Path, body: BytesIO, **kwargs: Any) -> Any:
        """A call of the S3 API with a body, which is given as a file and so sent piece by piece: every layer below
        would copy a bytearray, which takes as long as the checksums."""

        def act() -> Any:
            body.seek(0)  # also when it is sent again
            return self.s3(method, path, Body=body, **kwargs)

        return self.request("write", path, act)

    def of_parts(self) -> dict[str, str]:
        """What a new upload in parts is created with: that each part has a CRC, by which the store checks it again when
        it joins them; nothing where the user has turned checksums off, as for stores that do not know them."""
        config = getattr(self._fs.s3.meta.config, "request_checksum_calculation", None)
        return {"ChecksumAlgorithm": "CRC32", "ChecksumType": "COMPOSITE"} if config == "when_supported" else {}

    def check_access(self, path: Path) -> None:
        bucket, key, _ = self._fs.split_path(self.key(path))
        about = {"Bucket": bucket, "Prefix": f"{key}/", "MaxKeys": 1}
        self.request("names", path, lambda: self.call("call_s3", "list_objects_v2", **about))

    def version(self, path: Path) -> str:
        return str(self.request("exists", path, lambda: self.s3("head_object", path))["ETag"])

    def publish(self, path: Path, data: bytes, replaces: str | None) -> None:
        condition = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
        body = {"Body": data, "ChecksumSHA256": base64.b64encode(hashlib.sha256(data).digest()).decode()}

        def put() -> None:
            try:
                self.s3("put_object", path, **body, **condition)
            except Exception as error:
                if code_of(error) in ("NotImplemented", "501"):  # a store without conditional put
                    self.s3("put_object", path, **body)
                elif code_of(error) in ("PreconditionFailed", "412"):
                    raise FileExistsError(errno.EEXIST, "it has another content than was there before") from error
                else:
                    raise

        self._put_once(path, data, put)

    def abandon_uploads(self, path: Path) -> None:
        bucket, key, _ = self._fs.split_path(self.key(path))

        def act() -> None:
            found = self.call("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/")
            for upload in found.get("Uploads", ()):
                about = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                with suppress(FileNotFoundError):
                    self.call("call_s3", "abort_multipart_upload", **about)

        with suppress(ObjectMissing):
            self.request("remove", path, act)


def _written_ns(path: str) -> int:
    """When a file was written; 0 if it is not there, or not for this user."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


class SlowPut(CheckpointError):
    """One put of a whole file did not end in the time that a request has."""


class WholeOut(Out):
    """A new object of S3 of known size, which is gathered in memory and put by one request; in parts if that takes too
    long, since a request that is repeated begins with its first byte."""

    def __init__(self, storage: S3Storage, path: Path) -> None:
        self._store, self._path, self._body = storage, path, BytesIO()

    def write(self, data: memoryview) -> None:
        self._body.write(data)

    def finish(self) -> None:
        try:
            self._store.request("write", self._path, self._put)
        except SlowPut:
            self._put_in_parts()

    def _put(self) -> None:
        body = BytesIO(self._body.getvalue())  # shares its bytes; a request that is given up may close it
        try:
            self._store.s3("put_object", self._path, Body=body)
        except (TimeoutError, asyncio.TimeoutError) as error:
            if self._body.tell() <= PART_BYTES:
                raise
            raise SlowPut(f"one put of {self._path} took too long") from error

    def _put_in_parts(self) -> None:
        parts = PartsOut(self._store, self._path)
        try:
            with self._body.getbuffer() as data:
                parts.write(data)
            parts.finish()
        finally:
            parts.close()

    def close(self) -> None:
        self._body = BytesIO()


class PartsOut(Out):
    """A new object of S3, uploaded in parts while the next bytes come; a small one in a single request."""

    def __init__(self, storage: S3Storage, path: Path) -> None:
        self._store, self._path = storage, path
        self._buffer, self._bytes = BytesIO(), 0
        self._upload: str | None = None
        self._parts: list[Future[dict[str, str]]] = []
        self._threads = ThreadPoolExecutor(UPLOADS)

    def write(self, data: memoryview) -> None:
        self._bytes += len(data)
        while len(data):
            room = self._part_bytes() - self._buffer.tell()
            self._buffer.write(data[:room])
            data = data[room:]
            if self._buffer.tell() == self._part_bytes():
                self._send()

    def finish(self) -> None:
        if self._upload is None:
            self._store.upload("put_object", self._path, self._buffer)
            return
        if self._buffer.tell():
            self._send()
        tags = [{"PartNumber": number + 1, **part.result()} for number, part in enumerate(self._parts)]
        about = {"UploadId": self._upload, "MultipartUpload": {"Parts": tags}}
        try:
            self._store.request(
                "finish", self._path, lambda: self._store.s3("complete_multipart_upload", self._path, **about)
            )
        except ObjectMissing:  # the upload: perhaps it was completed by a request whose answer was lost
            if not self._store.exists(self._path) or self._store.size(self._path) != self._bytes:
                raise
        self._upload = None

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        upload, self._upload = self._upload, None
        if upload is not None:
            with suppress(CheckpointError):  # the next save tries again
                self._store.request(
                    "remove", self._path,
                    lambda: self._store.s3("abort_multipart_upload", self._path, UploadId=upload),
                )  # fmt: skip

    def _part_bytes(self) -> int:
        return PART_BYTES << len(self._parts) // PARTS_OF_ONE_SIZE

    def _send(self) -> None:
        """Begins to upload the buffer; first waits until fewer than UPLOADS parts are under way."""
        if self._upload is None:
            about = self._store.of_parts()
            made = self._store.request(
                "create", self._path, lambda: self._store.s3("create_multipart_upload", self._path, **about)
            )
            self._upload = made["UploadId"]
        if len(self._parts) >= UPLOADS:
            self._parts[-UPLOADS].result()
        body, self._buffer = self._buffer, BytesIO()
        self._parts.append(self._threads.submit(self._send_part, self._upload, len(self._parts) + 1, body))

    def _send_part(self, upload: str, number: int, body: BytesIO) -> dict[str, str]:
        """What the store says of the part, and is told again when the upload is completed."""
        sent = self._store.upload("upload_part", self._path, body, UploadId=upload, PartNumber=number)
        return {name: str(sent[name]) for name in ("ETag", CRC) if name in sent}
