"""Records of a run: metrics, progress, recorded rollouts, report, trace and timeline."""
