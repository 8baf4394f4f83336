"""Signatures of a user's own key, and of a key made for TLS."""

from __future__ import annotations

import base64
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from raafl.errors import BadInput
from raafl.runfolder.seals import Signer, is_signed, key_name, read_public_key


def write_key(path, key):
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


def test_a_users_key_is_made_once_and_nobody_else_reads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first, second = Signer.own(), Signer.own()
    assert first.public == second.public
    (path,) = (tmp_path / "raafl").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert Signer.own() is None


@pytest.mark.parametrize("kind", ["own", "tls"])
def test_a_signature_fits_its_text_and_key_alone(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    other = Signer.load(write_key(tmp_path / "other", ec.generate_private_key(ec.SECP256R1())))
    tls = Signer.load(write_key(tmp_path / "tls", ec.generate_private_key(ec.SECP256R1())))
    signer = Signer.own() if kind == "own" else tls
    signature = signer.sign("head")
    assert is_signed("head", signature, signer.public)
    assert not is_signed("heap", signature, signer.public)
    assert not is_signed("head", signature, other.public)
    damaged = bytearray(base64.b64decode(signature))
    damaged[10] ^= 1
    assert not is_signed("head", base64.b64encode(damaged).decode(), signer.public)
    assert read_public_key(signer.public) == signer.public and len(key_name(signer.public)) == 16


@pytest.mark.parametrize("value", [None, 1, "", "?", "AAAA", ["x"], "é"])
def test_what_is_no_signature_and_no_key_signs_nothing(tmp_path, value):
    signer = Signer.load(write_key(tmp_path / "key", ec.generate_private_key(ec.SECP256R1())))
    assert not is_signed("head", value, signer.public)
    assert not is_signed("head", signer.sign("head"), value)


def test_a_key_that_cannot_sign_is_refused_by_name(tmp_path):
    path = write_key(tmp_path / "rsa", rsa.generate_private_key(65537, 1024))
    with pytest.raises(BadInput, match=r"rsa', which is not supported: use an Ed25519 or ECDSA"):
        Signer.load(path)
    path.write_text("no key")
    with pytest.raises(BadInput, match="rsa', which cannot be read"):
        Signer.load(path)
    with pytest.raises(BadInput, match="key is 'nothing': give a public key in base64, or a PEM file"):
        read_public_key("nothing")
