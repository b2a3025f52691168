"""Settings: each has a user, is read by the product, is described, and there are few of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from shalekv import settings
from shalekv.cli.console.settings_flags import settings_of
from shalekv.settings import AnyConfig
from tests.style.sources import ROOT, python_sources

# A higher number is a decision: a setting needs a user who chooses better than we can.
SETTINGS_MAX = 114
