"""Which version of paged decode attention serves a batch: one pass, or keys split among programs."""

from __future__ import annotations

PARTITION_SIZE = 64  # tokens: the finest split; a guess
LONGEST_ONE_PASS = 1024  # tokens; a guess
ENOUGH_PROGRAMS = 2048  # rows times query heads that keep a GPU busy without splitting; a guess


def num_partitions(max_seq_len: int) -> int:
    return max(1, -(-max_seq_len // PARTITION_SIZE))


def choose_paged_attention_version(max_seq_len: int, batch_size: int, num_heads: int, max_num_partitions: int) -> str:
    """V1 (one pass) where nothing can be split and for large batches of short rows, else V2 (split, merge).

    Asked for layers that can have either: not those of 16 bits with up to 16 query heads a KV head
    (triton_decode.version_of), nor in a captured graph, which must serve the longest rows.
    """
    short = max_seq_len <= LONGEST_ONE_PASS and batch_size * num_heads >= ENOUGH_PROGRAMS
    return "V1" if max_num_partitions == 1 or short else "V2"
