"""The directory of cached blocks by node: records in Redis, and a mirror of them in each router.

    node: publish(events) -> OwnView -> publisher thread -> Redis SETs + one pub/sub stream
    router: stream, snapshots -> Mirror -> longest_prefix(hashes) in microseconds

`records`, `own_view`, `mirror` and `discovery` are pure; `publisher` and `reader` carry bytes.
"""
