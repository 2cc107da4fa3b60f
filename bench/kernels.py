#!/usr/bin/env python3
"""Cost of attention kernels on TPUs according to the schedule of libtpu's compiler; no TPU is needed.

    python3 bench/kernels.py [--build build] [--chips v5e:2x2,v5p:2x2x1,v6e:2x2,tpu7x:2x2x1] [--kernels forward]
                             [--length 4096] [--head-dim 128] [--block 1024] [--compute 512] [--jax PYTHON]

One head, bf16, no mask. A bundle is one instruction word: a cycle without stalls. `body` is the smallest region of the
program with 98 % of the matrix unit's work, which is one block of `--block` queries by as many keys; further columns are
its slots in units of bundles. With --jax, the path of a Python with jax, splash attention of that package is compiled
with the same block sizes and the same libtpu.
"""
import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))

SPLASH = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel, splash_attention_mask as masks
chip, what, length, size, block, compute = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
blocks = kernel.BlockSizes(block_q=block, block_kv=block, block_kv_compute=compute, block_q_dkv=block, block_kv_dkv=block,
                           block_kv_dkv_compute=compute, block_q_dq=block, block_kv_dq=block)
device = topologies.get_topology_desc(platform='tpu', topology_name=chip).devices[0]
mask = masks.MultiHeadMask([masks.FullMask((length, length))])
attention = kernel.make_splash_mha(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1)
x = jax.ShapeDtypeStruct((1, length, size), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
run = attention if what == 'forward' else jax.grad(lambda *a: attention(*a).astype(jnp.float32).sum(), (0, 1, 2))
jax.jit(lambda q, k, v: run(q, k, v)).trace(x, x, x).lower(lowering_platforms=('tpu',)).compile()
"""


def table(path):
    """Numbers of slots and, for each bundle, of the used ones."""
    names, capacity, rows = [], [], []
    for line in open(path):
        words = line.replace(',', ' ').split()
        if 'MATMUL' in words:
            names = [w.split(':')[-1] for w in words]
        elif words and all(w.isdigit() for w in words) and len(words) == len(names):
            if capacity:
                rows.append([int(w) for w in words])
            else:
                capacity = [int(w) for w in words]
    return names, capacity, rows


def regions(path):
    starts, found, address = {}, {}, 0
    for line in open(path):
        at = re.match(r'\s*(0x[0-9a-f]+|0)\s', line)
        if at:
            address = int(at.group(1), 16)
        for word, number in re.findall(r'(Start|End) region (\d+)', line):
            if word == 'Start':
                starts[number] = address
            else:
                found[number] = (starts.get(number, 0), address)
    return list(found.values())


def kernels(folder):
    """(name, bundles, bundles of the body, {slot: bundles in which its units are busy})."""
    for path in sorted(glob.glob(folder + '/*-final_bundles.txt')):
        name = re.match(r'\d+-(.*)-\d+-final_bundles.txt', os.path.basename(path))
        if not name or 'schedule-analysis' in path or 'late-' in path or 'TLP' in path:
            continue
        use = glob.glob(folder + '/*-' + glob.escape(name.group(1)) + '-*-final_hlo-static-per-bundle-utilization.txt')
        if not use:
            continue
        names, capacity, rows = table(use[0])
        total = sum(r[0] for r in rows)
        if not total:
            continue  # not a kernel with products
        body = min((r for r in regions(path) if sum(x[0] for x in rows[r[0]:r[1] + 1]) >= 0.98 * total),
                   key=lambda r: r[1] - r[0])
        inside = rows[body[0]:body[1] + 1]
        yield name.group(1), len(rows), len(inside), {
            n: round(sum(r[i] for r in inside) / capacity[i]) for i, n in enumerate(names)}


def attempted(command, environment, seconds=None):
    """The result of kernels() for a command's programs, and its last output line; an empty result if it fails."""
    folder = tempfile.mkdtemp(prefix='kernels')
    flags = f'--xla_jf_dump_to={folder} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true'
    try:
        done = subprocess.run(command, env={**os.environ, 'LIBTPU_INIT_ARGS': flags, 'TPU_SKIP_MDS_QUERY': '1',
                                            'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', **environment}, text=True,
                              capture_output=True, timeout=seconds)
        if done.returncode:
            errors = [l for l in done.stderr.splitlines() if l.startswith('error: ')] or done.stderr.splitlines()[-1:]
            return [], errors[0][:300] if errors else f'ended by signal {-done.returncode}'
        return list(kernels(folder)), (done.stdout.splitlines() or [''])[-1]
    except subprocess.TimeoutExpired:
        return [], f'no answer in {seconds:g} s'
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compiled(command, environment):
    found, message = attempted(command, environment)
    if not found:
        sys.exit(message)
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--build', default=os.path.join(HERE, '..', 'build'))
    p.add_argument('--chips', default='v5e:2x2,v5p:2x2x1,v6e:2x2,tpu7x:2x2x1')
    p.add_argument('--kernels', default='forward')
    p.add_argument('--length', type=int, default=4096)
    p.add_argument('--head-dim', type=int, default=128)
    p.add_argument('--block', type=int, default=1024)
    p.add_argument('--compute', type=int, default=0, help='block_kv_compute; 0: what the chip has by default')
    p.add_argument('--jax', help='a Python that has jax')
    p.add_argument('--libtpu', default=os.path.join(HERE, '..', '.deps', 'libtpu', 'libtpu.so'))
    p.add_argument('options', nargs='*', help='key=value for kernel_bench')
    o = p.parse_args()
    slots = ('MATMUL', 'EUP', 'VALU', 'VPOP', 'XLU', 'FILL', 'SPILL')
    print('| chip | program | kernel | bundles | body | ' + ' | '.join(slots) + ' |')
    print('| --- ' * (5 + len(slots)) + '|')
    for chip in o.chips.split(','):
        for what in o.kernels.split(','):
            size = f'{o.block}'
            blocks = [f'{k}={size}' for k in ('block_q', 'block_kv', 'block_q_dkv', 'block_kv_dkv', 'block_q_dq', 'block_kv_dq')]
            if o.compute:
                blocks += [f'block_kv_compute={o.compute}', f'block_kv_dkv_compute={o.compute}']
            runs = {'maxdiffusion.cpp': ([os.path.join(o.build, 'kernel_bench'), chip, what, str(o.length), str(o.head_dim)] +
                                         blocks + o.options, {})}
            if o.jax:
                runs['splash attention'] = ([o.jax, '-c', SPLASH, chip, what, str(o.length), str(o.head_dim), size, size],
                                            {'JAX_PLATFORMS': 'cpu', 'TPU_LIBRARY_PATH': o.libtpu})
            for program, (command, environment) in runs.items():
                for name, bundles, body, busy in compiled(command, environment):
                    print(f'| {chip} | {program} | {name} | {bundles} | {body} | ' +
                          ' | '.join(str(busy[s]) for s in slots) + ' |', flush=True)


if __name__ == '__main__':
    main()
