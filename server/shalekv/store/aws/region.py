"""Where a region comes from when no setting names one."""

from __future__ import annotations

DEFAULT_REGION = "us-east-1"

# botocore looks at AWS_DEFAULT_REGION alone; every other kit of Amazon's knows AWS_REGION.
REGION_VARIABLES = {"region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)}
