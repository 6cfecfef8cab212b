"""Makes real certificates for the tests of TLS: certificate authorities, and certificates that they sign."""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, each as a PEM file."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    cert_file: Path
    key_file: Path


def issue(
    directory: Path, name: str, issuer: Issued | None = None, addresses: Sequence[str] = ("127.0.0.1", "::1")
) -> Issued:
    """Make a certificate for some IP addresses, loopback by default, that `issuer` signs. Without `issuer`, make a
    certificate authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    subjects = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    signs = issuer is None
    certificate = (  # with all extensions that Python 3.13 wants (VERIFY_X509_STRICT)
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=signs, crl_sign=signs, **usage), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key((issuer.key if issuer else key).public_key()),
            critical=False,
        )
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), *subjects]), critical=False)
        .sign(issuer.key if issuer else key, hashes.SHA256())
    )
    cert_file, key_file = directory / f"{name}.pem", directory / f"{name}.key"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key_file.write_bytes(key.private_bytes(*private))
    key_file.chmod(0o600)
    return Issued(certificate, key, cert_file, key_file)
