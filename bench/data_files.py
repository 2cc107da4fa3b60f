"""Writes an image folder's records as emoji.parquet, emoji.arrow and emoji.array_record, for data_bench.

    python3 bench/data_files.py FOLDER_OF_PICTURES FOLDER_TO_WRITE

Needs pyarrow, array_record and tfrecord (for the tf.Example messages).
"""
import json
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter
from tfrecord import example_pb2

folder, out = sys.argv[1:]
rows = []
for line in open(os.path.join(folder, "metadata.jsonl")):
    row = json.loads(line)
    with open(os.path.join(folder, row["file_name"]), "rb") as f:
        rows.append((f.read(), row["text"]))
image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
table = pa.table({"image": pa.array([{"bytes": b, "path": None} for b, _ in rows], image), "text": [t for _, t in rows]})
pq.write_table(table, f"{out}/emoji.parquet", row_group_size=100)
with pa.ipc.new_stream(f"{out}/emoji.arrow", table.schema) as f:
    f.write_table(table, max_chunksize=1000)
writer = ArrayRecordWriter(f"{out}/emoji.array_record", "group_size:1")
for encoded, text in rows:
    e = example_pb2.Example()
    e.features.feature["image"].bytes_list.value.append(encoded)
    e.features.feature["text"].bytes_list.value.append(text.encode())
    writer.write(e.SerializeToString())
writer.close()
