"""The Kubernetes objects of deploy/, for tests that hold them to schemas and to the servers."""

import functools

import yaml

from tests import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
KUSTOMIZE = ("Kustomization", "Component")


def files():
    """Every YAML file with objects of Kubernetes."""
    folders = ("kubernetes/base", "kubernetes/python", "kubernetes/init-copy")
    found = [path for folder in folders for path in sorted((DEPLOY / folder).glob("*.yaml"))]
    found += sorted((DEPLOY / "monitoring").glob("*.yaml"))
    return (
        found
        + sorted((DEPLOY / "kserve").glob("*.yaml"))
        + sorted((DEPLOY / "kubeflow").glob("*.yaml"))
    )


@functools.cache
def objects():
    """File and object of each document that is one; no test may change them."""
    return [
        (path, document)
        for path in files()
        for document in yaml.safe_load_all(path.read_text())
        if isinstance(document, dict) and "apiVersion" in document
    ]


def one(kind, name="tessera"):
    """The object of a kind and a name that is whole, not a patch."""
    (found,) = [
        document
        for path, document in objects()
        if (document["kind"], document["metadata"]["name"] if "metadata" in document else "")
        == (kind, name)
        and path.parent.name != "init-copy"
    ]
    return found


def deployed_container():
    """The one container of the Deployment."""
    (container,) = one("Deployment")["spec"]["template"]["spec"]["containers"]
    return container


def copying_container():
    """The container of init-copy/ that copies the models before the server starts."""
    patch = yaml.safe_load((DEPLOY / "kubernetes/init-copy/copy.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["initContainers"]
    return container


def service_variables(address="10.0.0.1"):
    """What Kubernetes puts into containers of a namespace for the Service `tessera`."""
    ports = {port["name"]: str(port["port"]) for port in one("Service")["spec"]["ports"]}
    first = next(iter(ports.values()))
    variables = {
        "TESSERA_SERVICE_HOST": address,
        "TESSERA_SERVICE_PORT": first,
        "TESSERA_PORT": f"tcp://{address}:{first}",
    }
    for name, port in ports.items():
        link = f"TESSERA_PORT_{port}_TCP"
        variables |= {
            f"TESSERA_SERVICE_PORT_{name.upper()}": port,
            link: f"tcp://{address}:{port}",
            f"{link}_PROTO": "tcp",
            f"{link}_PORT": port,
            f"{link}_ADDR": address,
        }
    return variables


def server_flags(path):
    """The flags that ``path``, a server's config file, stands for and that do not name a place of the container."""
    settings = yaml.safe_load(path.read_text())
    own = ("host", "port", "http-port", "model-repository", "model-control")
    return [f"--{name}={value}" for name, value in settings.items() if name not in own]
