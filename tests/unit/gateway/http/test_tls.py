"""Which certificate is in use, until when, and when its files are believed."""

import datetime as dt
import ssl
from pathlib import Path

import pytest
import trustme

from gateway.http.tls import Certificates


def write(folder: Path, leaf: trustme.LeafCert) -> None:
    (folder / "cert.pem").write_bytes(b"".join(p.bytes() for p in leaf.cert_chain_pems))
    (folder / "key.pem").write_bytes(leaf.private_key_pem.bytes())


def opened(folder: Path) -> Certificates:
    return Certificates(str(folder / "cert.pem"), str(folder / "key.pem"))


@pytest.mark.parametrize("year", [2031, 2050])
def test_the_expiry_is_read_in_both_ways_of_writing_years(year: int, tmp_path: Path) -> None:
    """X.509 writes years from 2050 on with four digits."""
    end = dt.datetime(year, 2, 3, 4, 5, 6, tzinfo=dt.UTC)
    write(tmp_path, trustme.CA().issue_cert("a", not_after=end))
    assert opened(tmp_path).expires_unix_s == end.timestamp()


@pytest.mark.parametrize(
    "pem", ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"]
)
def test_what_is_no_certificate_is_refused(pem: str, tmp_path: Path) -> None:
    write(tmp_path, trustme.CA().issue_cert("a"))
    (tmp_path / "cert.pem").write_text(pem)
    with pytest.raises(ssl.SSLError):
        opened(tmp_path)


def test_files_that_vanish_or_come_back_unchanged_leave_the_pair_in_use(tmp_path: Path) -> None:
    write(tmp_path, trustme.CA().issue_cert("a"))
    found = opened(tmp_path)
    kept = (tmp_path / "key.pem").read_bytes()
    (tmp_path / "key.pem").unlink()
    found.look()
    assert not found.successful
    (tmp_path / "key.pem").write_bytes(kept)
    found.look()
    assert found.successful, "they fit again"
