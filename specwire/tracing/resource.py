"""What all spans of a process have in common."""

from collections.abc import Mapping

from opentelemetry.sdk.resources import Resource

from specwire.tracing.span import AttributeValue
from specwire.tracing.spec import SERVICE_PREFIX
from specwire.version import build_version


def make_resource(service: str, instance_id: str) -> Mapping[str, AttributeValue]:
    """Attributes of the process; OTEL_RESOURCE_ATTRIBUTES adds to them."""
    own = {"service.name": f"{SERVICE_PREFIX}{service}", "service.instance.id": instance_id, "service.version": build_version()}
    return dict(Resource.create(own).attributes)  # type: ignore[arg-type]  # sequences of floats, which nobody sets, are the difference
