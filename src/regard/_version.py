"""The one place that knows the version."""

version = "0.1.0"
