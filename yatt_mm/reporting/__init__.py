"""What people see of a run while it goes on, and find in its folder afterwards.

`report.py` writes metrics, progress and the other files, `tensorboard_file.py` what TensorBoard shows, `timeline.py`
the timeline, `fault_log.py` the faults. `learning_watch.py` sees whether there is anything to learn.

May import: common, keeper, placement, protocol.
"""
