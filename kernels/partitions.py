"""When decode attention splits a row's keys into partitions."""

from __future__ import annotations

PARTITION_SIZE = 512  # tokens
LONGEST_ONE_PASS = 8192  # tokens
ENOUGH_PROGRAMS = 512  # rows times heads that keep a GPU busy without splitting


def num_partitions(max_seq_len: int) -> int:
    return max(1, -(-max_seq_len // PARTITION_SIZE))


def choose_paged_attention_version(max_seq_len: int, batch_size: int, num_heads: int, max_num_partitions: int) -> str:
    """V1 (one pass) for short rows that have one partition or come in large batches, else V2 (split, reduce)."""
    few_keys = max_num_partitions == 1 or batch_size * num_heads > ENOUGH_PROGRAMS
    return "V1" if max_seq_len <= LONGEST_ONE_PASS and few_keys else "V2"
