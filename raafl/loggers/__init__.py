"""W&B, TensorBoard, MLflow and other Lightning loggers beside a run."""
