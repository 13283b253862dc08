"""The import that registers the backend ``smddp``; served by deepspeed-smddp."""

import deepspeed_smddp  # noqa: F401
