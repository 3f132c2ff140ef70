"""What a run leaves behind to look at: metrics, progress, recorded rollouts, report, trace and timeline."""
