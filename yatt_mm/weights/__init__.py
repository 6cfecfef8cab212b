"""Publishing weights: carrying the policy's weights from the training ranks to the engines.

`carriers.py` chooses one of three ways. `segment_publisher.py` writes a segment file in shared memory, whose format is
in `segment.py` and whose writer is in `segment_writer.py`. `device_publisher.py` shares GPU memory through
`cuda_ipc.py`. `stream_publisher.py` broadcasts the weights in buckets (`buckets.py`) to a group of receivers
(`stream_group.py`). `checked_copy.py` refuses weights that are not finite, and `rank_agreement.py` makes all ranks fail
together. The engines load what is published in `yatt_mm.rollout.weight_transfer`.

A new carrier is a publisher here, a choice in `carriers.py`, its name and message in `yatt_mm.protocol.published`, and
its reader in `yatt_mm.rollout.weight_transfer`.

May import: models.weights, protocol.
"""
