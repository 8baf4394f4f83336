"""Train and evaluate on a client: local steps of the user's own LightningModule, under Lightning Fabric."""
