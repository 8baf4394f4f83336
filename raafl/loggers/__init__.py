"""Send a run to W&B, TensorBoard, MLflow and other Lightning loggers."""
