"""The places outside of the metrics folder that get the numbers of a run: TensorBoard, Weights & Biases and
MLflow.

Each is one module here, with a class ``Tracker`` that has the two methods of
:class:`elastic.sinks.port.Sink`.  The name of the module is the name that ``metrics.sinks`` uses.  A new one
is a new module, and an extra of that name in ``pyproject.toml``.
"""
