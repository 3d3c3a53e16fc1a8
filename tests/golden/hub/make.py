"""Writes certificate.pem and key.pem: hub.invalid as its own authority, for a server of the tests only."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

here = Path(__file__).parent
key = Ed25519PrivateKey.generate()
name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hub.invalid")])
certificate = (
    x509.CertificateBuilder()
    .subject_name(name)
    .issuer_name(name)
    .public_key(key.public_key())
    .serial_number(1)
    .not_valid_before(datetime.datetime(2025, 1, 1))
    .not_valid_after(datetime.datetime(2125, 1, 1))
    .add_extension(x509.SubjectAlternativeName([x509.DNSName("hub.invalid")]), critical=False)
    .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    .sign(key, None)
)
pem = serialization.Encoding.PEM
(here / "certificate.pem").write_bytes(certificate.public_bytes(pem))
private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
(here / "key.pem").write_bytes(private)
