"""One embedded engine over several processes, each with slices of the model: `leader` and `followers` of an engine with processes of
its own (`processes` starts them), `pooled` for ranks that train and decode together."""
