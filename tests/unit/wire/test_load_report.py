"""The report of a server's load."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from bngrad_wire.load_report import LoadReport, parse

REPORT = LoadReport(1234.5678, 0.25, 3.5)


def test_the_text_can_be_read_again() -> None:
    assert REPORT.text() == ("TEXT rps_fractional=1235,application_utilization=0.25,named_metrics.requests=3.5")
    assert parse(REPORT.text()) == LoadReport(1235, 0.25, 3.5)


def test_the_binary_form_is_an_orca_load_report() -> None:
    """Read by protobuf itself, with the fields that xds/data/orca/v3/orca_load_report.proto gives these numbers."""
    file = descriptor_pb2.FileDescriptorProto(name="orca.proto", package="orca", syntax="proto3")
    message = file.message_type.add(name="OrcaLoadReport")
    double, entry = descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE, message.nested_type.add(name="NamedMetricsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=double, label=1)
    message.field.add(name="rps_fractional", number=6, type=double, label=1)
    message.field.add(
        name="named_metrics", number=8, type=11, type_name=".orca.OrcaLoadReport.NamedMetricsEntry", label=3
    )
    message.field.add(name="application_utilization", number=9, type=double, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("orca.OrcaLoadReport"))
    read = kind.FromString(REPORT.binary())
    assert read.rps_fractional == REPORT.rate  # type: ignore[attr-defined]
    assert read.application_utilization == REPORT.utilization  # type: ignore[attr-defined]
    assert dict(read.named_metrics) == {"requests": REPORT.requests}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "JSON {}",
        "TEXT ",
        "TEXT rps_fractional=1",
        "TEXT rps_fractional=1,application_utilization=x",
        "TEXT rps_fractional=nan,application_utilization=1",
        "TEXT rps_fractional=1,application_utilization=-1",
        "TEXT rps_fractional=1,application_utilization=1," + "x" * 512,
    ],
)
def test_a_malformed_report_is_none(text: str) -> None:
    assert parse(text) is None


def test_a_server_without_load_has_no_capacity() -> None:
    assert REPORT.capacity == pytest.approx(4938, rel=1e-3)
    assert LoadReport(0, 0, 0).capacity is None


def test_a_capacity_beyond_the_range_of_numbers_is_none() -> None:
    assert LoadReport(1e308, 1e-300, 1).capacity is None
    assert LoadReport(1e-300, 1e308, 1).capacity is None
