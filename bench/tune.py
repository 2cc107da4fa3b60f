#!/usr/bin/env python3
"""Finds block sizes of the attention kernels for a model from the schedule of the TPU compiler; no TPU is needed.

    ./run tune attention CONFIG topology=v5p:2x2x1 [key=value …] [--queries 512,1024,2048] [--keys 512,1024,2048]
                         [--compute 256,512,1024] [--seconds 120]

Tunes the largest attention of the training step. Predicts cycles: bundles of one block times the blocks of a head; a
bundle is a cycle without stalls. FILL and SPILL are bundles that move registers. Each size compiles in a separate
process, which is stopped after --seconds. The last line is the config key to paste.
"""
import argparse
import itertools
import math
import os
import re
import subprocess
import sys

import kernels

HERE = os.path.dirname(os.path.abspath(__file__))
PLACES = ('topology', 'hardware', 'attention', 'flash_block_sizes', 'per_device_batch_size', 'run_name', 'jax_cache_dir')


def stop(message):
    sys.exit('error: ' + message)


def key_of(word):
    return word.lstrip('-').split('=')[0]


def largest_attention(build, config, words):
    """(queries, keys, head_dim, is f32, causal) of the training step's attention with the most logits."""
    remaining = [w for w in words if key_of(w) not in PLACES and not re.match('(ici|dcn)_', key_of(w))]
    done = subprocess.run([os.path.join(build, 'maxdiffusion'), 'inspect', 'graph', config] + remaining +
                          ['hardware=cpu', 'attention=flash', 'per_device_batch_size=1', 'run_name=tune'],
                          text=True, capture_output=True)
    if done.returncode:
        sys.exit(done.stderr[max(done.stderr.find('error: '), 0):].strip() or 'error: inspect graph failed')
    found = []
    for arrays, rest in re.findall(r'kernel = "md_attention", operands = \d+ : i64, arrays = array<i64: ([^>]*)>([^}]*)',
                                   done.stdout):
        n = [int(x) for x in arrays.split(',')]  # for each array: buffer, offset, type, rank, sizes
        q, k = n[4:8], n[12:16]
        found.append((q[1], k[1], q[3], n[2] != 16, 'causal = true' in rest))
    for line in done.stdout.splitlines():
        if 'call_target_name = "md_attention"' in line:
            q, k = re.findall(r'tensor<\d+x(\d+)x\d+x(\d+)x(\w+)>', line.split(' : (')[1])[:2]
            found.append((int(q[0]), int(k[0]), int(q[1]), q[2] == 'f32', 'causal = true' in line))
    return max(found, key=lambda a: a[0] * a[1]) if found else stop('the training step has no attention without a bias')


class Search:
    def __init__(self, o, chip, attention):
        self.o, self.chip = o, chip
        self.queries, self.keys, self.head_dim, self.f32, self.causal = attention

    def cost(self, kernel, sizes):
        """Predicted cycles of a head, slots and the compiler's line; or the error as text."""
        q, kv, compute = sizes
        suffix = {'forward': '', 'gradient': '_dkv', 'dkv': '_dkv', 'dq': '_dq'}[kernel]
        names = {f'block_q{suffix}': q, f'block_kv{suffix}': kv}
        names['block_kv_compute' if kernel == 'forward' else 'block_kv_dkv_compute'] = compute
        if kernel == 'dq':
            names['block_kv_dkv'] = kv
        blocks = math.ceil(self.queries / q) * math.ceil(self.keys / kv)
        command = [os.path.join(self.o.build, 'kernel_bench'), self.chip, kernel, str(self.queries), str(self.head_dim),
                   f'keys={math.ceil(self.keys / kv) * kv}', f'f32={int(self.f32)}'] + [f'{k}={v}' for k, v in names.items()]
        found, reason = kernels.attempted(command, {}, self.o.seconds)
        if not found:
            return reason
        _, _, body, slots = max(found, key=lambda f: f[1])
        return body * blocks, slots, reason

    def best(self, kernel):
        tried = [s for s in itertools.product(self.o.queries, self.o.keys, self.o.compute)
                 if s[1] % s[2] == 0 and s[0] < self.queries + 512 and s[1] < self.keys + 512]
        rows = []
        for n, sizes in enumerate(tried):
            result = self.cost(kernel, sizes)
            ok = not isinstance(result, str)
            print(f'{n + 1} of {len(tried)}: {kernel} {sizes}: ' +
                  (f'{result[0] / 1e6:.1f} million cycles a head' if ok else result), file=sys.stderr, flush=True)
            if ok:
                rows.append((result[0], sizes, result[1], result[2]))
        for cycles, sizes, slots, reason in sorted(rows):
            memory = re.search(r'fast memory ([0-9.]+)', reason)
            print(f'| {kernel} | {sizes[0]} | {sizes[1]} | {sizes[2]} | {cycles / 1e6:.1f} | {slots["MATMUL"]} | {slots["FILL"]} '
                  f'| {slots["SPILL"]} | {memory.group(1) if memory else "–"} |', flush=True)
        return min(rows)[:2] if rows else None


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(x) for x in text.split(',')]
    p.add_argument('--build', default=os.path.join(HERE, '..', 'build'))
    p.add_argument('--queries', type=numbers, default=[512, 1024, 2048])
    p.add_argument('--keys', type=numbers, default=[512, 1024, 2048])
    p.add_argument('--compute', type=numbers, default=[256, 512, 1024])
    p.add_argument('--seconds', type=float, default=120)
    p.add_argument('words', nargs='*', help='attention CONFIG topology=… key=value …')
    o = p.parse_args()
    if len(o.words) < 2 or o.words[0] != 'attention' or '=' in o.words[1]:
        stop("tune: expected 'attention' and a config; try: ./run tune attention configs/base_wan_1_3b.yml topology=v5p:2x2x1")
    chip = next((w.split('=', 1)[1] for w in o.words if key_of(w) == 'topology'), '')
    if not chip:
        stop('topology is empty; expected the TPUs to tune for: topology=v5p:2x2x1')
    attention = largest_attention(o.build, o.words[1], o.words[2:])
    print(f'attention of {attention[0]} queries and {attention[1]} keys of {attention[2]} values, '
          f'{"f32" if attention[3] else "bf16"}, for {chip}')
    print('| kernel | queries | keys | compute | predicted cycles of a head, millions | MATMUL | FILL | SPILL | fast memory, MiB |')
    print('| --- ' * 9 + '|')
    search = Search(o, chip, attention)
    forward, fused = search.best('forward'), search.best('gradient')
    found = [forward, fused] if fused else [forward, search.best('dkv'), search.best('dq')]
    if None in found:
        stop('no block sizes were compiled; see the lines above')
    sizes = dict(zip(('block_q', 'block_kv', 'block_kv_compute'), forward[1]))
    sizes.update(zip(('block_q_dkv', 'block_kv_dkv', 'block_kv_dkv_compute'), found[1][1]))
    if not fused:
        sizes.update(zip(('block_q_dq', 'block_kv_dq'), found[2][1]))
    sizes['use_fused_bwd_kernel'] = 'true' if fused else 'false'
    print('flash_block_sizes: {' + ', '.join(f'{k}: {v}' for k, v in sizes.items()) + '}')


if __name__ == '__main__':
    main()
