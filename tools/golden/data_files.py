"""Writes small data sets of every kind, by the libraries that own the formats, into tests/golden/data/files.

    python tools/golden/data_files.py tests/golden/data/files

Needs pyarrow, datasets, webdataset, array_record, tfrecord, tensorboard (for TensorFlow's message definitions), Pillow
and numpy. All hold the same records; expected.json says which. ArrayRecord files are mostly zeros and so are gzipped.
"""
import gzip
import io
import json
import os
import shutil
import sys
import tempfile

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import webdataset
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image
from tensorboard.compat.proto import tensor_pb2, types_pb2
from tfrecord import example_pb2
from tfrecord.writer import TFRecordWriter

N = 7


def encoded_image(i):
    y, x = np.mgrid[0:9, 0:12]
    rgb = np.stack([20 * y + 10 * i, 20 * x, 30 * i + 0 * x], -1).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(rgb).save(out, format=["PNG", "JPEG", "WEBP"][i % 3])
    return out.getvalue()


def caption(i):
    return f"the {i}th picture, “ünïcode”"


def moments(i):
    return (np.arange(2 * 3 * 8).reshape(2, 3, 8) / 4 + 1000 * i).astype(np.float32)


def clip(i):
    return (np.arange(5 * 4).reshape(5, 4) / 8 - 1000 * i).astype(np.float32)


PICTURES = [encoded_image(i) for i in range(N)]
CAPTIONS = [caption(i) for i in range(N)]
EXTENSIONS = ["png", "jpg", "webp"]


def tables(root):
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

    def rows(which):
        return pa.table({
            "image": pa.array([{"bytes": PICTURES[i], "path": f"{i}.png"} for i in which], image),
            "text": pa.array([CAPTIONS[i] for i in which]),
        })

    os.makedirs(f"{root}/parquet/data")
    pq.write_table(rows(range(5)), f"{root}/parquet/data/train-00000-of-00002.parquet", row_group_size=2)
    pq.write_table(rows(range(5, N)), f"{root}/parquet/data/train-00001-of-00002.parquet", compression="zstd")
    pq.write_table(rows([0]), f"{root}/parquet/data/test-00000-of-00001.parquet")
    plain = pa.table({"picture": pa.array(PICTURES, pa.large_binary()),
                      "captions": pa.array([[c, "another"] for c in CAPTIONS])})
    pq.write_table(plain, f"{root}/plain.parquet", compression="brotli")
    with pa.ipc.new_file(f"{root}/plain.arrow", plain.schema,
                         options=pa.ipc.IpcWriteOptions(compression="lz4")) as f:
        f.write_table(plain, max_chunksize=3)
    paths = pa.table({"file": [f"pictures/{i}.{EXTENSIONS[i % 3]}" for i in range(N)], "text": CAPTIONS})
    pq.write_table(paths, f"{root}/paths.parquet")
    os.makedirs(f"{root}/pictures")
    for i in range(N):
        with open(f"{root}/pictures/{i}.{EXTENSIONS[i % 3]}", "wb") as f:
            f.write(PICTURES[i])
    with open(f"{root}/pictures/metadata.csv", "w", newline="") as f:
        f.write("file_name,text\r\n")
        for i in range(N):
            f.write(f'{i}.{EXTENSIONS[i % 3]},"{CAPTIONS[i]}"\r\n')


def videos(root):
    """Clip n has 4 + n frames of grey 20 + n + 6 i, at 10 per second."""
    def gif(n):
        frames = [Image.new("L", (20, 16), 20 + n + 6 * i) for i in range(4 + n)]
        out = io.BytesIO()
        frames[0].save(out, format="GIF", save_all=True, append_images=frames[1:], duration=100)
        return out.getvalue()

    video = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": gif(n), "path": f"{n}.gif"} for n in range(3)] + [{"bytes": b"no video", "path": "bad.mp4"}]
    table = pa.table({"video": pa.array(rows, video), "caption": [str(n) for n in range(4)]})
    pq.write_table(table, f"{root}/videos.parquet", row_group_size=2)


def saved_to_disk(root):
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})

    def part(which):
        rows = {"image": [{"bytes": PICTURES[i], "path": None} for i in which], "text": [CAPTIONS[i] for i in which]}
        return datasets.Dataset.from_dict(rows, features=features)

    datasets.DatasetDict({"train": part(range(N)), "test": part([0])}).save_to_disk(f"{root}/saved", num_shards={
        "train": 2, "test": 1})
    arrays = datasets.Dataset.from_dict(
        {"moments": [moments(i) for i in range(N)], "clip_embeddings": [clip(i).tolist() for i in range(N)],
         "number": list(range(N))},
        features=datasets.Features({"moments": datasets.Array3D((2, 3, 8), "float32"),
                                    "clip_embeddings": datasets.List(datasets.List(datasets.Value("float32"))),
                                    "number": datasets.Value("int32")}))
    arrays.save_to_disk(f"{root}/saved_arrays")
    arrays.to_parquet(f"{root}/arrays.parquet")
    for folder, _, files in os.walk(root):
        for name in files:
            if name == "dataset_info.json":  # not read, and it contains the date
                os.remove(f"{folder}/{name}")


def tensor(a, content=True):
    t = tensor_pb2.TensorProto()
    t.dtype = {"float32": types_pb2.DT_FLOAT, "int32": types_pb2.DT_INT32}[str(a.dtype)]
    for size in a.shape:
        t.tensor_shape.dim.add().size = size
    if content:
        t.tensor_content = a.tobytes()
    elif a.dtype == np.float32:
        t.float_val.extend(a.reshape(-1).tolist())
    else:
        t.int_val.extend(a.reshape(-1).tolist())
    return t.SerializeToString()


def example(features):
    e = example_pb2.Example()
    for key, value in features.items():
        e.features.feature[key].bytes_list.value.append(value)
    return e.SerializeToString()


def tfrecords(root):
    os.makedirs(f"{root}/laion")
    for shard, which in enumerate([range(4), range(4, N)]):
        writer = TFRecordWriter(f"{root}/laion/file_{shard:02}-{len(which)}.tfrec")
        for i in which:
            # One shard for each of the two pairs of names, and both forms of a tensor.
            names = ["moments", "clip_embeddings"] if shard == 0 else ["latents", "hidden_states"]
            writer.write({names[0]: (tensor(moments(i), i % 2), "byte"), names[1]: (tensor(clip(i)), "byte")})
        writer.close()
    writer = TFRecordWriter(f"{root}/sdxl.tfrecord")
    for i in range(N):
        writer.write({"pixel_values": (tensor(moments(i)), "byte"), "prompt_embeds": (tensor(clip(i)), "byte"),
                      "text_embeds": (tensor(clip(i)[0]), "byte"),
                      "input_ids": (tensor(np.full((2, 3), i, np.int32), i % 2), "byte")})
    writer.close()
    writer = TFRecordWriter(f"{root}/pictures.tfrecord")
    for i in range(N):
        writer.write({"image": (PICTURES[i], "byte"), "text": (CAPTIONS[i].encode(), "byte")})
    writer.close()


def tars(root):
    for shard, which in enumerate([range(4), range(4, N)]):
        with webdataset.TarWriter(f"{root}/shard-{shard:06}.tar", mtime=0, user="", group="") as writer:
            for i in which:
                key = f"{'a_long_name_of_a_folder/' * 8 if i == 5 else ''}{i:05}"
                text = {"json": json.dumps({"text": CAPTIONS[i]}).encode()} if i % 2 else {"txt": CAPTIONS[i]}
                writer.write({"__key__": key, EXTENSIONS[i % 3]: PICTURES[i], "cls": b"7", **text})


def array_records(root):
    for name, options in {"plain": "group_size:1,uncompressed", "zstd": "group_size:3",
                          "brotli": "group_size:100,brotli", "snappy": "group_size:2,snappy"}.items():
        with tempfile.TemporaryDirectory() as folder:
            writer = ArrayRecordWriter(f"{folder}/it", options)
            for i in range(N):
                # Records that cross block headers.
                filler = {"filler": bytes((7 * j + i) % 251 for j in range(251)) * 120} if name == "plain" and i < 4 else {}
                writer.write(example({"moments": tensor(moments(i)), "clip_embeddings": tensor(clip(i)),
                                      "image": PICTURES[i], "text": CAPTIONS[i].encode(), **filler}))
            writer.close()
            with open(f"{folder}/it", "rb") as f, open(f"{root}/{name}.array_record.gz", "wb") as to:
                to.write(gzip.compress(f.read(), mtime=0))
    with tempfile.TemporaryDirectory() as folder:
        writer = ArrayRecordWriter(f"{folder}/it", "transpose:true")
        writer.write(example({"text": b"x"}))
        writer.close()
        with open(f"{folder}/it", "rb") as f, open(f"{root}/transposed.array_record.gz", "wb") as to:
            to.write(gzip.compress(f.read(), mtime=0))


def main(root):
    shutil.rmtree(root, ignore_errors=True)
    os.makedirs(root)
    tables(root)
    videos(root)
    saved_to_disk(root)
    tfrecords(root)
    tars(root)
    array_records(root)
    with open(f"{root}/expected.json", "w") as f:
        json.dump({"records": [{"picture": p.hex(), "caption": c} for p, c in zip(PICTURES, CAPTIONS)]}, f,
                  ensure_ascii=False, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main(sys.argv[1])
