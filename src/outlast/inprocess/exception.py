"""The exceptions of restart in place; `outlast.errors` documents the whole tree."""

from outlast.errors import FaultCounterExceeded as FaultCounterExceeded
from outlast.errors import HealthCheckError as HealthCheckError
from outlast.errors import InternalError as InternalError
from outlast.errors import RankDiscarded as RankDiscarded
from outlast.errors import RankFault as RankFault
from outlast.errors import RankLostError as RankLostError
from outlast.errors import RankShouldRestart as RankShouldRestart
from outlast.errors import RankTimeout as RankTimeout
from outlast.errors import RestartAbort as RestartAbort
from outlast.errors import RestartError as RestartError
from outlast.errors import StoreError as StoreError
from outlast.errors import UnrecoverableFault as UnrecoverableFault

TimeoutError = RankTimeout  # its name in nvidia-resiliency-ext

# See `system.lazy_exports`.
vars()["__all__"] = [name for name in [*vars()] if name[0].isupper() and name != "TimeoutError"]
