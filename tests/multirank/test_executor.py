"""The executor on real process groups: results, order, failures, reuse."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.pool import RankFailure
