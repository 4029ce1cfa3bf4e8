"""The way without deltas: boto3 uploads the files of a checkpoint in parts, or downloads them.

    python benchmarks/rig/dense.py up|down ENDPOINT BUCKET DIRECTORY

Parts of 16 MiB, ten at a time. Prints a JSON line with the seconds, the bytes and the peak of the process's memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import boto3
from boto3.s3.transfer import TransferConfig

sys.path[:0] = [str(Path(__file__).parents[2])]

from benchmarks.rig.machine import peak_mb  # noqa: E402

PART, AT_ONCE = 16 << 20, 10


def main(way: str, endpoint: str, bucket: str, directory: Path) -> None:
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    config = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=AT_ONCE)
    began = time.monotonic()
    if way == "up":
        for file in sorted(directory.glob("*.safetensors")):
            client.upload_file(str(file), bucket, f"dense/{file.name}", Config=config)
    else:
        for found in client.list_objects_v2(Bucket=bucket, Prefix="dense/")["Contents"]:
            client.download_file(bucket, found["Key"], str(directory / Path(found["Key"]).name), Config=config)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    print(json.dumps({"seconds": time.monotonic() - began, "bytes": size, "peak_mb": peak_mb(os.getpid())}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
