"""The client and the judge of signed requests: boto3 behind the proxy, moto as AWS, and botocore's own signer.

aws.py setup PORT        creates a user at moto's port, and prints the id and the secret of its key as JSON
aws.py role PORT ID SECRET   creates a role at moto's port that the key may assume, and prints its ARN as JSON
aws.py store PORT ID SECRET VALUE   creates secrets and a parameter with values, and prints the ARN of one as JSON
aws.py use ENDPOINT      uses several services behind the proxy, and prints what it found as JSON
aws.py verify SECRET     reads requests as lines of JSON, and prints how many have the signature that botocore makes
"""

import base64
import json
import sys
from urllib.parse import quote, unquote

import boto3
import botocore.auth
import botocore.awsrequest
import botocore.client
import botocore.credentials
import botocore.exceptions

CONFIG = botocore.client.Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
POLICY = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
KEYS = ["plain.txt", "a b/ä€.txt", "x+y=1&2;3", "100%/~-_.", "'(quoted)'", "k:v,w"]


def client(service, endpoint, **key):
    return boto3.client(service, endpoint_url=endpoint, config=CONFIG, region_name="eu-central-1", **key)


def setup(port):
    endpoint = f"http://127.0.0.1:{port}"
    iam = client("iam", endpoint, aws_access_key_id="setup", aws_secret_access_key="setup")
    iam.create_user(UserName="agent")
    iam.put_user_policy(UserName="agent", PolicyName="all", PolicyDocument=json.dumps(POLICY))
    key = iam.create_access_key(UserName="agent")["AccessKey"]
    # From now on, moto verifies signatures.
    wrong = client("sqs", endpoint, aws_access_key_id=key["AccessKeyId"], aws_secret_access_key="wrong")
    try:
        wrong.list_queues()
        raise SystemExit("moto does not verify signatures")
    except botocore.exceptions.ClientError as error:
        print(json.dumps({"id": key["AccessKeyId"], "secret": key["SecretAccessKey"], "wrong": error.response["Error"]["Code"]}))


def role(port, key_id, secret):
    key = {"aws_access_key_id": key_id, "aws_secret_access_key": secret}
    iam = client("iam", f"http://127.0.0.1:{port}", **key)
    trust = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"AWS": "*"}}]}
    arn = iam.create_role(RoleName="agent", AssumeRolePolicyDocument=json.dumps(trust))["Role"]["Arn"]
    iam.put_role_policy(RoleName="agent", PolicyName="all", PolicyDocument=json.dumps(POLICY))
    print(json.dumps({"arn": arn}))


def store(port, key_id, secret, value):
    key = {"aws_access_key_id": key_id, "aws_secret_access_key": secret}
    secrets = client("secretsmanager", f"http://127.0.0.1:{port}", **key)
    document = json.dumps({"token": value, "user": "agent"})
    arn = secrets.create_secret(Name="prod/github", SecretString=document)["ARN"]
    secrets.create_secret(Name="binary", SecretBinary=b"\0\1\2")
    parameters = client("ssm", f"http://127.0.0.1:{port}", **key)
    parameters.put_parameter(Name="/prod/github/token", Value=value, Type="SecureString")
    print(json.dumps({"arn": arn}))


def use(endpoint):
    found = {}
    s3 = client("s3", endpoint)
    s3.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    for key in KEYS:
        s3.put_object(Bucket="bucket", Key=key, Body=key.encode() * 50_000, Metadata={"note": "two  words"})
    found["keys"] = sorted(item["Key"] for item in s3.list_objects_v2(Bucket="bucket", Prefix="")["Contents"])
    found["bodies"] = all(s3.get_object(Bucket="bucket", Key=key)["Body"].read() == key.encode() * 50_000 for key in KEYS)
    s3.delete_object(Bucket="bucket", Key=KEYS[0])
    sqs = client("sqs", endpoint)
    url = sqs.create_queue(QueueName="queue")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody="ä message")
    found["message"] = sqs.receive_message(QueueUrl=url)["Messages"][0]["Body"]
    dynamodb = client("dynamodb", endpoint)
    dynamodb.create_table(
        TableName="table",
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    dynamodb.put_item(TableName="table", Item={"id": {"S": "ä"}})
    found["item"] = dynamodb.get_item(TableName="table", Key={"id": {"S": "ä"}})["Item"]["id"]["S"]
    found["user"] = client("sts", endpoint).get_caller_identity()["Arn"]
    print(json.dumps(found))


class AtTime(botocore.auth.SigV4Auth):
    """Takes the payload's hash from the field, as services do."""

    def payload(self, request):
        return request.headers.get("X-Amz-Content-SHA256") or super().payload(request)


class S3AtTime(AtTime):
    def _normalize_url_path(self, path):
        return quote(unquote(path), safe="/-_.~")


def verify(secret):
    right = 0
    for line in sys.stdin:
        seen = json.loads(line)
        headers = {name.lower(): value for name, value in seen["headers"]}
        fields = dict(part.split("=", 1) for part in headers["authorization"].split(" ", 1)[1].split(", "))
        key_id, _, region, service, _ = fields["Credential"].split("/")
        kind = S3AtTime if service == "s3" else AtTime
        signer = kind(botocore.credentials.Credentials(key_id, secret), service, region)
        signed = {name: headers[name] for name in fields["SignedHeaders"].split(";")}
        request = botocore.awsrequest.AWSRequest(
            method=seen["method"], url=seen["url"], headers=signed, data=base64.b64decode(seen["body"])
        )
        request.context["timestamp"] = headers["x-amz-date"]
        text = signer.string_to_sign(request, signer.canonical_request(request))
        if signer.signature(text, request) == fields["Signature"]:
            right += 1
        else:
            print(signer.canonical_request(request), file=sys.stderr)
    print(right)


{"setup": setup, "role": role, "store": store, "use": use, "verify": verify}[sys.argv[1]](*sys.argv[2:])
