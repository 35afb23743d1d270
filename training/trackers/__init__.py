"""Trackers: where a run's numbers go besides its own folder, such as TensorBoard, MLflow or W&B.

`tracker` says what one is and finds it by the name in ``run.trackers``, `kinds` holds ours, and
`attached` lets one that fails or is slow do no harm to the training.
"""
