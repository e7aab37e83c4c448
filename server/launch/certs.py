"""The files that let machines of a deployment know each other.

    ca.crt, ca.key              the authority; every machine needs ca.crt
    server.crt, server.key      the server's certificate, for its host names
    clients/NAME.key, NAME.pub  a client's key pair; the server learns NAME.pub

Keys are on the curve P-384, the one Flower's SuperNodes use. Private keys have mode
0600, appear whole or not at all, and are never overwritten: what is to be made anew is
deleted first.
"""

import contextlib
import ipaddress
import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedgs.deployment import (
    THIS_MACHINE,
    check_curve,
    check_name,
    public_key,
    read_host,
)
from fedgs.errors import UserError, wrap_error
from fedgs.files import make_folder, sync

AUTHORITY_DAYS = 3650
SERVER_DAYS = 365
ANEW = "delete it to have it made anew"
CLOCK_SKEW = timedelta(days=1)  # of a client whose clock is behind


def make_certificates(
    folder: Path,
    hosts: Sequence[str],
    clients: Sequence[str],
) -> list[Path]:
    """Makes what is missing: authority and server certificate, clients' key pairs.

    Args:
        folder: where to; is made with mode 0700.
        hosts: names or addresses by which clients reach the server; none: no authority
            and no server certificate, for a client that makes its own key.
        clients: names of clients to make a key pair for.

    Returns:
        The files that were written.

    Raises:
        UserError: an invalid name, or a certificate of other hosts that is in the way.
    """
    if not hosts and not clients:
        raise UserError("certs: give --host of the server, --client names, or both")
    for name in clients:
        check_name(name)
    # This machine too, for `submit` on the server or by tunnel. Each name once.
    all_names = [_host(host) for host in (*hosts, *THIS_MACHINE)]
    names = list(dict.fromkeys(all_names))
    remedy = "choose another folder for the certificates"
    with wrap_error(OSError, f"{folder}: it cannot be written", remedy):
        make_folder(folder, 0o700)
        written = []
        # The authority first, because it signs the server's certificate.
        if hosts:
            written += _authority(folder)
            written += _server(folder, names)
        for name in clients:
            written += _client(folder / "clients", name)
        return written


# ------------------------------------------------------------------ the three kinds


def _authority(folder: Path) -> list[Path]:
    certificate = folder / "ca.crt"
    if certificate.exists():
        return []
    key, written = _key(folder / "ca.key")
    name = _name("fedgs deployment authority")
    # It signs machines, and no further authority.
    is_authority = x509.BasicConstraints(ca=True, path_length=0)
    _certify(
        path=certificate,
        subject=name,
        key=key,
        issuer=name,
        signer=key,
        days=AUTHORITY_DAYS,
        limits=(is_authority, _usage("key_cert_sign", "crl_sign")),
    )
    return [*written, certificate]


def _server(folder: Path, names: list[x509.GeneralName]) -> list[Path]:
    certificate = folder / "server.crt"
    if certificate.exists():
        known = _hosts_of(certificate)
        for name in names:
            if name not in known:
                raise UserError(f"{certificate}: it is not for {name.value}; {ANEW}")
        check_issued(certificate, folder / "ca.crt")
        owner = _certificates(certificate)[0].public_key()
        _check_pair(folder / "server.key", certificate, owner)
        return []
    if not (folder / "ca.key").exists():
        raise UserError(
            f"{folder}/ca.key: it is not here; put the authority's key back to make a "
            "server certificate"
        )
    path = folder / "ca.crt"
    authority = _certificates(path)[0]
    _check_pair(folder / "ca.key", path, authority.public_key())
    signer = _load_key(folder / "ca.key")
    key, written = _key(folder / "server.key")
    is_no_authority = x509.BasicConstraints(ca=False, path_length=None)
    _certify(
        path=certificate,
        subject=_name("fedgs server"),
        key=key,
        issuer=authority.subject,
        signer=signer,
        days=SERVER_DAYS,
        limits=(is_no_authority, _usage("digital_signature")),
        purpose=(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
            x509.SubjectAlternativeName(names),
        ),
    )
    return [*written, certificate]


def _client(folder: Path, name: str) -> list[Path]:
    make_folder(folder, 0o700)
    private = folder / f"{name}.key"
    public = folder / f"{name}.pub"
    if public.exists():
        # The server may know the public one already, so that no other takes its place.
        known = public_key(f"client = {name}: {public}", public)
        _check_pair(private, public, known)
        return []
    # The format that Flower's SuperNodes read.
    key, written = _key(private, PrivateFormat.OpenSSH)
    check_curve(f"client = {name}: {private}", key.curve)
    content = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(public, content + f" {name}\n".encode(), 0o644)
    return [*written, public]


# ------------------------------------------------------------------ pieces


def _key(
    path: Path,
    form: PrivateFormat = PrivateFormat.PKCS8,
) -> tuple[ec.EllipticCurvePrivateKey, list[Path]]:
    """Returns the key in a file, or a new one written to it."""
    if path.exists():
        return _load_key(path), []
    key = ec.generate_private_key(ec.SECP384R1())
    _write(path, key.private_bytes(Encoding.PEM, form, NoEncryption()), 0o600)
    return key, [path]


def check_issued(certificate: Path, authority: Path) -> None:
    """Refuses a certificate that another authority has signed.

    Args:
        certificate: of the server; behind it, in the same file, those between.
        authority: whose certificate clients have.

    Raises:
        UserError: names both files.
    """
    leaf, *between = _certificates(certificate)
    for signer in (*between, *_certificates(authority)):
        with contextlib.suppress(InvalidSignature, TypeError, ValueError):
            leaf.verify_directly_issued_by(signer)
            return
    raise UserError(f"{certificate}: {authority} did not sign it; {ANEW}")


def _certificates(path: Path) -> list[x509.Certificate]:
    problem = f"{path}: it is no certificate in PEM form"
    with wrap_error((OSError, ValueError), problem, "put the right file back"):
        return x509.load_pem_x509_certificates(path.read_bytes())


def _check_pair(private: Path, public: Path, key: PublicKeyTypes) -> None:
    """Refuses a public file without its private key.

    Raises:
        UserError: the key is missing, or another one's.
    """
    remedy = f"put the right one back, or delete {public.name} to have both made anew"
    if not private.exists():
        raise UserError(f"{private}: it is not here; {remedy}")
    if _load_key(private).public_key() != key:
        raise UserError(f"{private}: it is not the key of {public.name}; {remedy}")


def _hosts_of(path: Path) -> x509.SubjectAlternativeName:
    """Returns the names that a server's certificate is for."""
    problem = f"{path}: it is no certificate of a host"
    with wrap_error((x509.ExtensionNotFound, ValueError), problem, ANEW):
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
        return names.value


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    content = path.read_bytes()
    load = load_pem_private_key
    if b"OPENSSH" in content:
        load = load_ssh_private_key
    # Nobody is there to type a password when a server starts.
    problem = f"{path}: it is no private key without a password"
    with wrap_error((TypeError, ValueError), problem, "put the right file back"):
        key = load(content, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(
            f"{path}: it is no elliptic-curve key; give one of `fedgs deploy`"
        )
    return key


def _certify(
    path: Path,
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    days: int,
    limits: Sequence[x509.ExtensionType],
    purpose: Sequence[x509.ExtensionType] = (),
) -> None:
    """Writes a certificate; who does not understand its `limits` must refuse it."""
    now = datetime.now(UTC)
    public = key.public_key()
    builder = x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=public,
        serial_number=x509.random_serial_number(),
        not_valid_before=now - CLOCK_SKEW,
        not_valid_after=now + timedelta(days=days),
    )
    identifiers = (
        x509.SubjectKeyIdentifier.from_public_key(public),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    )
    for extension in (*identifiers, *limits, *purpose):
        builder = builder.add_extension(extension, critical=extension in limits)
    signed = builder.sign(signer, SHA384())
    _write(path, signed.public_bytes(Encoding.PEM), 0o644)


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature="digital_signature" in allowed,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign="key_cert_sign" in allowed,
        crl_sign="crl_sign" in allowed,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    wildcard = "*." if host.startswith("*.") else ""
    name = read_host("host", host.removeprefix(wildcard))
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    return x509.DNSName(wildcard + name)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Writes a new file with its mode; fails where one exists."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with open(os.open(temporary, flags, mode), "wb") as file:
            # The umask may have taken bits of the mode away.
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, never overwrites
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
