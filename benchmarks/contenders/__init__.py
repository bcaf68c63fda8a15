"""The engines that are measured, each used as its documentation says."""
